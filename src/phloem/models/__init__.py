"""Checkpoints to ModelSpec, tensors and tokenizer; the torch decoder."""
