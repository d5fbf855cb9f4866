"""StepPlan to tensors to forward pass to samples; owns the KV buffers."""
