"""Files of other programs as runs.

``file_numbers``
    Numbers beside the arrays of a file, as attributes of a run: the configuration it tells.
``import_arrays``
    The runs of a file that is recognised by its arrays, and what each array was taken for.
``import_file``
    Files that people already have, as runs.
``import_limits``
    How large a file may be that is imported, before a value of it is read.
``import_native``
    What a safetensors file of `trajstore.export` holds, under its own names.
``import_options``
    What the user of an import says, in place of what is recognised or beside it.
``imported_file``
    What a file holds, once it is recognised and every shape and type is checked.
``learning_rates``
    Learning rates that a file does not hold, by a schedule that its user names.
``read_runs``
    What a file holds, with what its user says of it: the one way from a path to runs.
``row_alignment``
    What the rows of a file mean: states after their steps or before them, and what row 0 holds.
``run_parts``
    Which arrays of a file make which run, where it holds several, or both matrices of a model.
``run_reading``
    One run of a file, put together of its arrays: steps, tokens, variables, attributes.
``step_labels``
    Steps of the rows of a file: some labels count callbacks instead, and some files have none.
``token_annotations``
    What a file of masks, ids or counts tells of the tokens of a run that is there.
``token_tables``
    Which tokens a file has rows of, which of them are dead, and how often they occur.
"""
