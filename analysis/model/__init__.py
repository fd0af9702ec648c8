"""Logits and hidden states of the model.

``gradient_explanation``
    Gradients of dead tokens, computed from the recorded hidden states.
``logit_statistics``
    Statistics of the recorded logits.
``mean_state_logits``
    Logits of the mean hidden state, and the tokens with the largest ones.
"""
