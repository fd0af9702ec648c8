"""The floating-point types of trainers, norms per token, and the arithmetic of optimizers."""
