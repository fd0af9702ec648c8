"""States of a disk after a loss of power, built from the calls that `powerloss.c` recorded.

The power may fail after each call. These rules define what is on the disk then:

1. Everything that was flushed is kept: the data of a file as at its last fsync, and the names in a
   folder as at the last fsync of the folder. The files and names at the start count as flushed,
   unless the caller declares them unflushed.
2. The data of a file that changed after its last fsync is complete, missing (as at that fsync), cut
   in half, or zeros where it was written. This holds for all such files at once, and for each alone
   missing with all others complete.
3. Names that were made, moved or removed after the last fsync of their folder are reordered: none
   of the changes is kept, all are, each alone is kept, and each alone is missing.
4. A rename is atomic, and kept after an fsync of its target folder. An exchange is a rename.
5. fsync of a file does not keep its name; fsync of a folder does not keep the data of its files.

Each choice of rule 2 is combined with no change and with all changes of names; each other choice of
names, with all data complete and with all missing. Files are singled out if there are at most
MOST_CHANGES, and the newest MOST_CHANGES changes of names. States with the same folders, names and
data are one. Leftovers of dead processes, such as ``.run.zarr.123.partial``, distinguish states
only by being there or not, as no command reads them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

Tree = dict[str, bytes | None]
"""Data of files, and None for folders, by their paths below the root."""

UNREAD = re.compile(r"\..+\.\d+(\.partial|\.old)")
MOST_CHANGES = 12
EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
MODES = ("whole", "missing", "half", "zeros")


@dataclass(frozen=True)
class Call:
    """One call, with the paths below the root ("" is the root itself)."""

    name: str
    number: int
    path: str
    other: str
    data: bytes


def calls_of(log: Path, root: Path) -> list[Call]:
    """Calls that were written down, in their order."""
    data = log.read_bytes()
    calls: list[Call] = []
    at = 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, *numbers = data[at:end].decode().split(" ")
        number, *sizes = map(int, numbers)
        parts = []
        at = end + 1
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        one, two = (part.decode() for part in parts[:2])
        if name not in ("note", "symlink"):
            one, two = (os.path.relpath(path, root) if path else "" for path in (one, two))
            one, two = ("" if path == "." else path for path in (one, two))
        calls.append(Call(name, number, one, two, parts[2]))
    return calls


def tree_of(root: Path) -> Tree:
    """What a folder holds."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def digest_of(entries: Iterable[tuple[str, bytes]]) -> bytes:
    """Digest of paths and the digests of what they hold, but for what nobody reads."""
    whole = hashlib.sha256()
    left = False
    for path, digest in entries:
        if any(UNREAD.fullmatch(name) for name in path.split("/")):
            left = True
        else:
            whole.update(path.encode() + b"\0" + digest)
    return whole.digest() + bytes([left])


@dataclass(eq=False)
class File:
    """Data of a file, now and at its last fsync, and where it was written since."""

    data: bytearray = field(default_factory=bytearray)
    kept: bytes = b""
    written: list[tuple[int, int]] = field(default_factory=list)
    changed: bool = False
    digests: dict[str, bytes] = field(default_factory=dict)

    def content(self, mode: str) -> bytes:
        """Data by rule 2."""
        if not self.changed or mode == "whole":
            return bytes(self.data)
        if mode == "missing":
            return self.kept
        if mode == "zeros":
            data = bytearray(self.data)
            for start, end in self.written:
                data[start:end] = bytes(len(data[start:end]))
            return bytes(data)
        start = min((start for start, _ in self.written), default=0)
        end = max((end for _, end in self.written), default=len(self.data))
        middle = (start + end) // 2
        return bytes(self.data[:middle] + self.kept[middle:])

    def digest(self, mode: str) -> bytes:
        """Digest of that, kept until the next call."""
        mode = mode if self.changed else "whole"
        if mode not in self.digests:
            self.digests[mode] = hashlib.sha256(self.content(mode)).digest()
        return self.digests[mode]


@dataclass(eq=False)
class Folder:
    """Names in a folder, now and at its last fsync."""

    names: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(eq=False)
class Change:
    """Names that one call changed: in `folder`, to which it leads, and perhaps in another."""

    folder: Folder
    sets: list[tuple[Folder, str, Node]]
    removes: list[tuple[Folder, str, Node]]

    def apply(self, names: dict[Folder, dict[str, Node]]) -> None:
        """Change them in a copy of the names of all folders."""
        for folder, name, node in self.removes:
            if names[folder].get(name) is node:
                del names[folder][name]
        for folder, name, node in self.sets:
            names[folder][name] = node


class Disk:
    """A folder as calls change it.

    Parameters
    ----------
    tree : Tree
        What is there at the start.
    unflushed : bool
        None of it has been flushed.
    """

    def __init__(self, tree: Tree, *, unflushed: bool = False) -> None:
        self.root = Folder()
        self.folders = [self.root]
        self.changes: list[Change] = []
        for path in sorted(tree):
            data = tree[path]
            node: Node = Folder() if data is None else File(bytearray(data))
            self._add(path, node)
            if isinstance(node, File):
                node.written, node.changed = [(0, len(node.data))], True
        if not unflushed:
            self._flush_all()

    def carry_out(self, call: Call) -> None:
        """Make a call."""
        if call.name == "create":
            self._add(call.path, File())
        elif call.name == "mkdir":
            self._add(call.path, Folder())
        elif call.name == "link":
            self._add(call.other, self._node(call.path))
        elif call.name in ("write", "truncate", "allocate"):
            self._change(self._node(call.path), call)
        elif call.name == "rename":
            self._move(call.path, call.other, exchange=bool(call.number & EXCHANGE))
        elif call.name == "unlink":
            folder, name = self._place(call.path)
            node = folder.names.pop(name)
            self.changes.append(Change(folder, [], [(folder, name, node)]))
        elif call.name == "fsync":
            self._flush(self._node(call.path))
        elif call.name == "sync":
            self._flush_all()
        elif call.name != "note":
            raise ValueError(f"no rule for {call.name} of {call.path}")

    def tree(self) -> Tree:
        """What is there while the power is on."""
        return self._tree({folder: folder.names for folder in self.folders}, {}, "whole")

    def states(self) -> Iterator[tuple[bytes, Callable[[], Tree]]]:
        """What may be there after a loss of power, each once: its digest, and what makes it."""
        seen = set()
        for number, names in enumerate(self._choices_of_names()):
            files = [node for node in _files(self.root, names) if node.changed]
            choices: list[tuple[dict[File, str], str]] = [({}, mode) for mode in MODES]
            if number > 1:
                choices = choices[:2]
            elif 1 < len(files) <= MOST_CHANGES:
                choices += [({file: "missing"}, "whole") for file in files]
            for modes, others in choices if files else choices[:1]:
                digest = self._digest(names, modes, others)
                if digest not in seen:
                    seen.add(digest)
                    yield digest, partial(self._tree, names, modes, others)

    def _choices_of_names(self) -> Iterator[dict[Folder, dict[str, Node]]]:
        many = len(self.changes)
        recent = range(max(0, many - MOST_CHANGES), many)
        choices = [frozenset(), frozenset(range(many))]
        choices += [frozenset({each}) for each in recent]
        choices += [frozenset(range(many)) - {each} for each in recent]
        for chosen in dict.fromkeys(choices):
            names = {folder: dict(folder.kept) for folder in self.folders}
            for each in sorted(chosen):
                self.changes[each].apply(names)
            yield names

    def _digest(
        self, names: dict[Folder, dict[str, Node]], modes: dict[File, str], others: str
    ) -> bytes:
        return digest_of(
            (path, node.digest(modes.get(node, others)) if isinstance(node, File) else b"")
            for path, node in _walk(self.root, names)
        )

    def _tree(
        self, names: dict[Folder, dict[str, Node]], modes: dict[File, str], others: str
    ) -> Tree:
        return {
            path: node.content(modes.get(node, others)) if isinstance(node, File) else None
            for path, node in _walk(self.root, names)
        }

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for name in path.split("/") if path else []:
            assert isinstance(node, Folder)
            node = node.names[name]
        return node

    def _place(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._node(above)
        assert isinstance(folder, Folder)
        return folder, name

    def _add(self, path: str, node: Node) -> None:
        folder, name = self._place(path)
        folder.names[name] = node
        if isinstance(node, Folder):
            self.folders.append(node)
        self.changes.append(Change(folder, [(folder, name, node)], []))

    def _move(self, one: str, two: str, *, exchange: bool) -> None:
        (source, old), (target, new) = self._place(one), self._place(two)
        node = source.names.pop(old)
        change = Change(target, [(target, new, node)], [(source, old, node)])
        if exchange:
            other = target.names[new]
            source.names[old] = other
            change.sets.append((source, old, other))
        target.names[new] = node
        self.changes.append(change)

    def _change(self, file: Node, call: Call) -> None:
        assert isinstance(file, File)
        size, start, end = len(file.data), call.number, call.number + len(call.data)
        if call.name == "truncate":
            end = start
            del file.data[start:]
        if len(file.data) < end:
            file.data += bytes(end - len(file.data))
        file.data[start:end] = call.data
        file.written.append((min(size, start), end))
        file.changed = True
        file.digests.clear()

    def _flush(self, node: Node) -> None:
        if isinstance(node, File):
            node.kept, node.written, node.changed = bytes(node.data), [], False
            node.digests.clear()
            return
        kept = {folder: folder.kept for folder in self.folders}
        for change in self.changes:
            if change.folder is node:
                change.apply(kept)
        self.changes = [change for change in self.changes if change.folder is not node]

    def _flush_all(self) -> None:
        for node in _files(self.root, {folder: folder.names for folder in self.folders}):
            self._flush(node)
        for folder in self.folders:
            folder.kept = dict(folder.names)
        self.changes = []


def _walk(
    root: Folder, names: dict[Folder, dict[str, Node]], above: str = ""
) -> Iterator[tuple[str, Node]]:
    for name in sorted(names[root]):
        node = names[root][name]
        yield above + name, node
        if isinstance(node, Folder):
            yield from _walk(node, names, f"{above}{name}/")


def _files(root: Folder, names: dict[Folder, dict[str, Node]]) -> list[File]:
    return [node for _, node in _walk(root, names) if isinstance(node, File)]
