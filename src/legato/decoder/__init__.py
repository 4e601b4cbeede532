"""The fused decoder: one forward pass for many families, driven by a spec read off the loaded model."""
