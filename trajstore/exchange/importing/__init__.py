"""Import of files of other programs.

``file_numbers``
    Single numbers of a file, and the attributes of a run that they become.
``file_rows``
    Rows of a file: their number, their steps, and the state that each row holds.
``import_arrays``
    Runs of a file of named arrays, and the table of its arrays and numbers.
``import_file``
    The public function: a file to one or several runs.
``import_options``
    Options of an import.
``import_whole``
    Content of a file that holds a whole run: an export in the layout native or hdf5.
``imported_file``
    Content of a file, with checked shapes and types.
``named_arrays``
    Variable or coordinate that each array of a file holds, by its name and ``--map``.
``read_runs``
    Runs of a file under the given options: the only way from a path to runs.
``run_parts``
    Assignment of arrays to runs, for files of several runs or of both matrices of a model.
``assembled_run``
    One run, assembled from the arrays of a file: steps, tokens, variables, attributes.
``token_masks``
    Files of masks, ids or counts that label dead tokens, for an import or an existing run.
``token_tables``
    Tokens of the rows of a file: their ids, which are dead, and their counts.
"""
