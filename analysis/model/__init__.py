"""Logits and hidden states of the model.

``gradient_explanation``
    The gradient of a dead token's unembedding, from the states that were unembedded.
``logit_statistics``
    What the model predicts: statistics of the recorded logits.
"""
