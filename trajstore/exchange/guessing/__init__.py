"""Which array of a file holds which variable.

``array_roles``
    What each array of a file is taken for: by its name, its type and its shape; never silently.
``number_reading``
    Numbers beside the arrays of a file: attributes, texts that are numbers, arrays of one value.
``role_table``
    What the arrays of a file can be: roles, the names in use, dimensions and types.
``tied_matrices``
    Whether the two matrices of a model are one: its unembedding is its embedding.
"""
