"""Texts and tokenizers to train on.

``corpus`` makes token ids of a text with a ``tokenizer``; without a text it takes the embedded one,
``embedded_corpus.txt.bz2``. ``fetch`` downloads texts and tokenizers to the user's cache, and finds
them there.
"""
