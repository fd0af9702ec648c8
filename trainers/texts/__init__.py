"""Texts and tokenizers to train on.

``corpus`` converts a text to token ids with a ``tokenizer``. Without a text it uses the embedded
one, ``embedded_corpus.txt.bz2``. ``fetch`` downloads texts and tokenizers to the user's cache and
finds them there.
"""
