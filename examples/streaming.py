"""Tokens as they are generated: in a thread, and in asyncio."""

import asyncio

from legato import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, RequestStatus

model = AutoModelForCausalLM.from_pretrained("smollm2", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("smollm2")
generation_config = GenerationConfig(max_new_tokens=24, eos_token_id=tokenizer.eos_token_id)
input_ids = tokenizer.encode("Once upon a time")

with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
    manager.add_request(input_ids=input_ids, request_id="streamed", streaming=True)

    for chunk in manager.request_id_iter(request_id="streamed"):
        token = tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
        print(token, end="", flush=True)
        if chunk.status == RequestStatus.FINISHED:
            break
    print()

    async def answer(request_id: str, prompt: str) -> str:
        manager.add_request(tokenizer.encode(prompt), request_id, streaming=True)
        async for chunk in manager.request_id_iter(request_id):
            tokens = chunk.generated_tokens
        return tokenizer.decode(tokens, skip_special_tokens=True)

    async def several() -> list[str]:
        return await asyncio.gather(answer("a", "The sun is"), answer("b", "The moon is"))

    for text in asyncio.run(several()):
        print(text)
