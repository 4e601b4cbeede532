"""The real scheduler and cache under a virtual clock: what a trace of requests would meet, without a model."""
