"""Logits and hidden states of the model, and its layers.

``attention_circuits``
    OV and QK circuits of attention heads.
``gradient_explanation``
    Gradients of dead tokens, computed from the recorded hidden states.
``layer_metrics``
    Metrics of one matrix.
``layers``
    Metrics of every parameter, gradient, update or head at each step.
``logit_statistics``
    Statistics of the recorded logits.
``mean_state_logits``
    Logits of the mean hidden state, and the tokens with the largest ones.
"""
