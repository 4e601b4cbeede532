"""The log-probability of every generated token."""

from legato import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

model = AutoModelForCausalLM.from_pretrained("smollm2", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("smollm2")
inputs = [tokenizer.encode("Roses are red, violets are")]

cb_config = ContinuousBatchingConfig(return_logprobs=True)

outputs = model.generate_batch(
    inputs=inputs,
    generation_config=GenerationConfig(max_new_tokens=8),
    continuous_batching_config=cb_config,
)

for _request_id, output in outputs.items():
    for token_id, log_prob in zip(output.generated_tokens, output.logprobs, strict=True):
        token = tokenizer.decode([token_id])
        print(f"{token} | logprob: {log_prob}")
