"""Logits and explained gradients of the model, and metrics of its layers."""
