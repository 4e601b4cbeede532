"""The settings of memory and scheduling, one after the other, then a run with some of them."""

from legato import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

cb_config = ContinuousBatchingConfig(page_size=128)
cb_config = ContinuousBatchingConfig(max_batch_tokens=16384)
cb_config = ContinuousBatchingConfig(max_requests_per_batch=256)
cb_config = ContinuousBatchingConfig(safety_margin=0.15)
cb_config = ContinuousBatchingConfig(scheduler_type="prefill_first")
cb_config = ContinuousBatchingConfig(default_compile_level=1)
cb_config = ContinuousBatchingConfig(max_blocks_per_request=64)
cb_config = ContinuousBatchingConfig(max_blocks_per_request=0)
cb_config = ContinuousBatchingConfig(cpu_offload_space=8.0)
cb_config = ContinuousBatchingConfig(cpu_group_timeout=600.0)
cb_config = ContinuousBatchingConfig(
    allow_block_sharing=True,  # default
)
cb_config = ContinuousBatchingConfig(
    page_size=256,
    num_blocks=4096,
    max_batch_tokens=512,
    max_memory_percent=0.8,
)
print(cb_config)

model = AutoModelForCausalLM.from_pretrained("smollm2", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("smollm2")
inputs = [tokenizer.encode("Water boils at")]
generation_config = GenerationConfig(max_new_tokens=8)

cb_config = ContinuousBatchingConfig(
    max_memory_percent=0.8,
    page_size=256,  # KV cache page size in tokens
    scheduler_type="fifo",  # "fifo" or "prefill_first"
)

outputs = model.generate_batch(
    inputs=inputs,
    generation_config=generation_config,
    continuous_batching_config=cb_config,
)
for output in outputs.values():
    print(tokenizer.decode(output.generated_tokens))
