"""A hybrid model: sliding layers keep their window only, full layers everything."""

import torch

from legato import AutoConfig, AutoModelForCausalLM, AutoTokenizer

config = AutoConfig.from_pretrained("gemma3")
config.sliding_window = 4096

model = AutoModelForCausalLM.from_pretrained(
    "gemma3",
    config=config,
    attn_implementation="sdpa",
    device_map="auto",
    dtype=torch.bfloat16,
)

tokenizer = AutoTokenizer.from_pretrained("gemma3")
manager = model.init_continuous_batching()
print(manager.describe())
manager.destroy()

outputs = model.generate_batch([tokenizer.encode("The longest river of Africa is")], max_new_tokens=8)
for output in outputs.values():
    print(tokenizer.decode(output.generated_tokens))
