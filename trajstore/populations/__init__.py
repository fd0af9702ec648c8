"""Named sets of tokens.

``expressions``
    Tokens that an expression over their coordinates chooses; nothing in it is ever executed.
``files``
    Populations as they are given on the command line: expressions, and files of masks and ids.
``masks``
    The populations of a Dataset: dead, live and all tokens, and every other mask along token.
``named``
    Populations of the user's own: masks, lists of ids, labels, expressions.
"""
