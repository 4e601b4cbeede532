"""A manager by hand: start, submit, cancel, fetch, stop, start again, destroy."""

from legato import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = AutoModelForCausalLM.from_pretrained("smollm2", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("smollm2")
generation_config = GenerationConfig(max_new_tokens=16, eos_token_id=tokenizer.eos_token_id)
input_ids = tokenizer.encode("The three primary colours are")
inputs = [tokenizer.encode(p) for p in ("What's up?", "Name a cat breed.")]

manager = model.init_continuous_batching(generation_config=generation_config)
manager.start()

manager.add_request(input_ids=input_ids, request_id="my_request")

# filter for a specific request
result = manager.get_result(request_id="my_request")
print(tokenizer.decode(result.generated_tokens))

manager.add_requests(inputs=inputs)

# next available result
result = manager.get_result()
print(tokenizer.decode(result.generated_tokens))

manager.add_request(input_ids=input_ids, request_id="my_request", max_new_tokens=4000)
manager.cancel_request(request_id="my_request")
print(manager.get_result(request_id="my_request").finish_reason)

# what is queued and active is finished first
manager.stop()
print("running:", manager.is_running())

manager.start()
manager.add_request(input_ids=input_ids, request_id="abandoned", max_new_tokens=4000)
# what is queued and active fails with a RuntimeError
manager.stop(hard_stop=True)
for result in manager:
    print(result.request_id, result.error or tokenizer.decode(result.generated_tokens))

manager.destroy()
