"""The `zarr.json` documents of a run.

zarr-python itself writes them once, into memory (`new_run`); afterwards only the
length of the step axis and the attributes of the root change. The root carries the metadata of all
arrays (Zarr's inline consolidated metadata), hence their shapes: replacing this one object is the
commit.

What the root says of the run and no commit changes is also an attribute of the array ``step``, as
one JSON text: from it a lost root is made again, and against it a damaged one is noticed. Where a
run goes on with other attributes, ``step`` first says what they are going to be, so that whenever
the writer dies, the root has either those or the ones before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from trajstore.schema import STEP, VARIABLES
from trajstore.store.metadata.document_form import Status
from trajstore.store.metadata.fingerprint import CHANGING, COMING, COPY, Fingerprint
from trajstore.strict_json import utc_now

__all__ = ["CHANGING", "COPY", "RunMetadata", "Status"]


class RunMetadata:
    """Metadata of one run, as text.

    Parameters
    ----------
    arrays : mapping of str to dict
        Document of each array, coordinates included, with any number of rows.
    attributes : mapping
        Attributes of the root but those that are `CHANGING`; JSON values.
    """

    def __init__(self, arrays: Mapping[str, dict[str, Any]], attributes: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)
        copy = json.dumps(dict(attributes), allow_nan=False)
        self._attributes: dict[str, Any] = json.loads(copy)  # keys are text, as a reader has them
        self._stored_step = step = self._arrays[STEP.name]
        self._arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: copy}}
        # Whatever else lies in the group is its owner's, and stays as it is.
        self._series = tuple(
            name for name in self._arrays if name == STEP.name or name in VARIABLES
        )

    @classmethod
    def stored(cls, root: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Self:
        """Of a run that is there.

        Parameters
        ----------
        root : mapping
            Its root document.
        attributes : mapping, optional
            Attributes that take the place of those it has.
        """
        fixed = {name: value for name, value in root["attributes"].items() if name not in CHANGING}
        return cls(root["consolidated_metadata"]["metadata"], fixed | dict(attributes or {}))

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the root but those that are `CHANGING`."""
        return self._attributes

    def array(self, name: str, rows: int) -> bytes:
        """Document of an array that holds that many rows."""
        return _dump(self._with_rows(name, rows))

    def announcement(self) -> bytes | None:
        """Document of ``step`` as it was stored, with what is going to change in the root.

        None if nothing does.
        """
        stored = self._stored_step
        coming = self._arrays[STEP.name]["attributes"][COPY]
        if stored["attributes"].get(COPY) == coming:
            return None
        return _dump(stored | {"attributes": stored["attributes"] | {COMING: coming}})

    def names(self) -> tuple[str, ...]:
        """All arrays, coordinates included."""
        return tuple(self._arrays)

    def series(self) -> tuple[str, ...]:
        """The arrays that grow with the rows."""
        return self._series

    def fingerprint(self, coordinates: Mapping[str, bytes], block_rows: int) -> Fingerprint:
        """Digests of the run without rows; `coordinates` by their keys."""
        return Fingerprint(self._arrays, self._attributes, coordinates, block_rows)

    def root(self, rows: int, status: Status, digests: Mapping[str, str]) -> bytes:
        """Document of the root: attributes, digests, and every array at that many rows."""
        changing = {"status": status, "committed_rows": rows, "updated": utc_now(), **digests}
        return _dump(
            {
                "zarr_format": 3,
                "node_type": "group",
                "attributes": self._attributes | changing,
                "consolidated_metadata": {
                    "kind": "inline",
                    "must_understand": False,
                    "metadata": {name: self._with_rows(name, rows) for name in self._arrays},
                },
            }
        )

    def _with_rows(self, name: str, rows: int) -> dict[str, Any]:
        document = self._arrays[name]
        if name not in self._series:
            return document
        return document | {"shape": [rows, *document["shape"][1:]]}


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode()
