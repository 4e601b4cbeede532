"""Text in, text out."""

from legato import LLM, SamplingParams

with LLM("smollm2") as llm:
    params = [SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=0.8, seed=7, max_tokens=16)]
    for output in llm.generate(["The capital of France is", "A good name for a cat is"], params):
        print(output.finish_reason, repr(output.text))

    (output,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=32))
    print(output.text)

    for piece in llm.stream([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0, max_tokens=32)):
        print(piece, end="", flush=True)
    print()
