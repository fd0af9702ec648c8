"""Files of other programs as runs.

``file_numbers``
    Numbers beside the arrays of a file, as attributes of a run: the configuration it holds.
``file_rows``
    The rows of a file: how many there may be, their steps, and the state that each of them holds.
``import_arrays``
    The runs of a file whose arrays are detected, and what each array was taken for.
``import_file``
    Files that people already have, as runs.
``import_native``
    What a safetensors file of `trajstore.export` holds, under its own names.
``import_options``
    Options of an import: what its user decides about the file.
``imported_file``
    What a file holds, once it is detected and every shape and type is checked.
``learning_rates``
    Learning rates that a file does not hold, by a schedule that its user names.
``read_runs``
    The runs of a file, as its user's options have them: the one way from a path to runs.
``run_parts``
    Which arrays of a file make which run, where it holds several, or both matrices of a model.
``assembled_run``
    One run of a file, put together of its arrays: steps, tokens, variables, attributes.
``token_masks``
    Files of masks, ids or counts: which tokens are dead, for an import or for an existing run.
``token_tables``
    Which tokens a file has rows of, which of them are dead, and how often they occur.
"""
