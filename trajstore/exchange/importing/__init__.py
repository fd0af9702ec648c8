"""Import of files of other programs.

``file_numbers``
    Single numbers of a file, as attributes of a run: its configuration.
``file_rows``
    Rows of a file: their number, their steps, and the state that each row holds.
``import_arrays``
    Runs of a file with detected arrays, and the table of detections.
``import_file``
    The public function: a file to one or several runs.
``import_options``
    Options of an import.
``import_whole``
    Content of a file that holds a whole run: an export in the layout native or hdf5.
``imported_file``
    Content of a file after detection, with checked shapes and types.
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
