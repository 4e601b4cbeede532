"""Generate for a list of prompts: the model object you already have, and one call."""

import torch

from legato import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = AutoModelForCausalLM.from_pretrained(
    "smollm2",
    attn_implementation="sdpa",
    device_map="auto",
    dtype=torch.bfloat16,
)
tokenizer = AutoTokenizer.from_pretrained("smollm2")

prompts = [
    "What's up?",
    "Name a cat breed.",
    "Write a detailed history of quantum mechanics.",
]
chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
inputs = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]

generation_config = GenerationConfig(
    max_new_tokens=64,
    eos_token_id=tokenizer.eos_token_id,
)

outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)

for request_id, output in outputs.items():
    text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    print(f"[{request_id}] {text}")
