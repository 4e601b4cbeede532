"""Makes copying.json: prompts whose answers copy much of them. Run from the repository's root, with SmolLM2 pulled.

Code that is to be changed a little, and texts that are to be quoted from, written for this file. Answers are as long as
the model makes them, so that no figure comes from what a model repeats after its answer has ended.
"""

import json
from pathlib import Path

from legato import LLM, SamplingParams

MOST_NEW_TOKENS = 320

CODE = {
    "inventory": """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError("not enough of " + name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())""",
    "statistics": """def summarize(values):
    count = len(values)
    if count == 0:
        return {"count": 0, "mean": None, "low": None, "high": None}
    total = 0
    low = values[0]
    high = values[0]
    for value in values:
        total += value
        if value < low:
            low = value
        if value > high:
            high = value
    return {"count": count, "mean": total / count, "low": low, "high": high}""",
    "config": """[server]
host = "127.0.0.1"
port = 8080
workers = 4
timeout_seconds = 30

[cache]
directory = "/var/cache/tool"
max_megabytes = 512
policy = "lru"

[logging]
level = "info"
file = "/var/log/tool.log"
rotate_daily = true""",
    "html": """<form action="/register" method="post">
  <label for="name">Name</label>
  <input id="name" name="name" type="text" required>
  <label for="email">E-mail</label>
  <input id="email" name="email" type="email" required>
  <label for="password">Password</label>
  <input id="password" name="password" type="password" minlength="12" required>
  <button type="submit">Register</button>
</form>""",
}
EDITS = {
    "inventory": "Rename the method `total` to `count_all`. Give the whole class again.",
    "statistics": "Rename the function to `describe`. Give the whole function again.",
    "config": "This is a configuration file. Write the same file with port 9090.",
    "html": "Change the button's text to Sign up. Give the whole form again.",
}
TEXTS = {
    "harbour": (
        "The old harbour of Lindvik was built in 1843 by a company of nine merchants. Its two piers are made of "
        "granite that was quarried on the island of Store Holm and brought over in winter, when sledges could "
        "cross the ice. For sixty years the harbour lived off herring. When the herring left the coast in 1907, "
        "half of the town's families left with it, and the warehouses stood empty until a maker of musical "
        "instruments moved into the largest of them in 1921. Today the piers belong to the town, and the "
        "warehouses hold a library, a school of music and the workshop of the instrument maker's great-"
        "granddaughter."
    ),
    "minutes": (
        "Minutes of the meeting on 4 March. Present: Ines, Tomas, Jun, Adaeze. Ines reported that the new pump "
        "arrived two weeks late and that the supplier will pay for the delay. Tomas said that the water tank must "
        "be cleaned before the pump is put in, and offered to do it on Saturday with Jun. Adaeze asked for a "
        "second quote for the electrical work, because the first one was forty percent above the plan. It was "
        "agreed that no order is placed before the second quote is there. The next meeting is on 18 March at the "
        "usual place."
    ),
    "recipe": (
        "For the flat bread take 500 grams of wheat flour, 300 grams of water, 10 grams of salt and 5 grams of dry"
        " yeast. Mix flour and water and let them stand for half an hour. Add salt and yeast and knead for ten "
        "minutes, until the dough is smooth. Let it rise in a covered bowl for an hour, fold it once, and let it "
        "rise for another hour. Divide it into eight pieces, roll each out to the thickness of a finger, and bake "
        "them on a hot stone for six minutes, until they have brown spots."
    ),
    "birds": (
        "Swifts spend almost all of their lives in the air. They eat, drink, gather what they build their nests "
        "of, and even sleep in flight. A young swift that leaves the nest may not touch anything solid again for "
        "two or three years, until it breeds for the first time. Swifts fly at up to 110 kilometres an hour under "
        "their own power, which makes them the fastest birds in level flight that have been measured with care. In"
        " bad weather they fly around the front of a storm, and their young, left alone for days, fall into a "
        "torpor and live off their fat."
    ),
}  # fmt: skip
QUESTIONS = {
    "harbour": "Copy the sentences of this text that say when something happened, word for word.",
    "minutes": "Write a summary of these minutes that quotes what each person said, word for word.",
    "recipe": "Write this recipe out again, word for word, one sentence to a line.",
    "birds": "Summarize this text in direct quotes from it, at least four of them.",
}


def main() -> None:
    prompts = [f"{EDITS[name]}\n\n```\n{code}\n```" for name, code in CODE.items()]
    prompts += [f"{QUESTIONS[name]}\n\n{text}" for name, text in TEXTS.items()]
    with LLM("smollm2") as llm:
        params = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    requests = [{"prompt_ids": o.prompt_ids, "max_new_tokens": len(o.generated_tokens)} for o in outputs]
    Path("bench/copying.json").write_text(json.dumps({"name": "copying", "requests": requests}) + "\n")
    for output in outputs:
        print(len(output.prompt_ids), len(output.generated_tokens), output.finish_reason, repr(output.text))


if __name__ == "__main__":
    main()
