"""Each request its own temperature, top-k and top-p, in the same batch."""

from legato import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

model = AutoModelForCausalLM.from_pretrained("smollm2", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("smollm2")
generation_config = GenerationConfig(max_new_tokens=24, do_sample=True, eos_token_id=tokenizer.eos_token_id)
inputs_a = tokenizer.encode("A poem about rain:")
inputs_b = tokenizer.encode("The capital of Italy is")

cb_config = ContinuousBatchingConfig(per_request_processors=True)

with model.continuous_batching_context_manager(
    generation_config=generation_config, continuous_batching_config=cb_config
) as manager:
    # each request gets its own sampling parameters
    manager.add_request(input_ids=inputs_a, temperature=0.9, top_p=0.95)
    manager.add_request(input_ids=inputs_b, temperature=0.1, top_k=10)

    for result in manager:
        print(tokenizer.decode(result.generated_tokens))
