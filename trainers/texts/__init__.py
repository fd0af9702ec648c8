"""Texts and tokenizers to train on.

``corpus`` makes token ids of a text with a ``tokenizer``; ``fetch`` downloads both to the
``cache``; ``generated_corpus`` holds the embedded ones.
"""
