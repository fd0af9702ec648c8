"""The embedded corpora, generated, the same bytes everywhere.

`gatsby_standin` is English-like text that stands in for The Great Gatsby where no text is given: as
long (265,905 bytes), as many distinct bytes (77 of 128), sentences of a small grammar over a
vocabulary whose words are used with Zipf's frequencies, in paragraphs with dialogue. The generator
uses only `random.Random.random`, whose sequence Python promises to keep.

`id_stream` stands in for a text in GPT-2's tokens, where there is no tokenizer either: as many ids
as the notebooks' web text has, independent of each other, with Zipf's frequencies. It uses only the
raw bits of NumPy's PCG64, which NumPy promises to keep.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

__all__ = ["GATSBY_SIZE", "ID_STREAM_SIZE", "gatsby_standin", "id_stream"]

GATSBY_SIZE = 265_905
ID_STREAM_SIZE = 475_160

_SEED = 1925

_NOUNS = """
man house night hand eye day woman room door time face voice window car light friend car water
word street way morning thing garden party year table life girl moment hour town side evening head
name road bed summer wife husband dress glass world money arm tree boat letter chair music lawn
smile family neighbor dinner city train heart afternoon mother father brother sister question idea
story week month minute corner wall floor stair hall porch bay shore island bridge river hill
valley field breeze station office bank shop market church school club hotel kitchen library book
page paper picture photograph frame mirror lamp candle fire smoke ash dust rain wind storm cloud
moon star sun sky shadow color silence sound laugh song dance drink bottle cocktail cigarette
match hat coat shoe shirt button ring watch clock bell telephone wheel engine horse dog bird fish
flower rose leaf grass stone sand wave ship sail captain doctor driver butler gardener cousin
stranger guest crowd secret rumor dream memory promise mistake reason truth lie past future chance
luck war peace business trade bond share price number answer trouble accident body blood bone
finger shoulder knee foot mouth lip hair cheek tear breath skin curtain carpet ceiling gate fence
path wood
""".split()

_VERBS = """
look turn gaze walk ask call want seem move open watch start stop cross pass reach point nod laugh
smile whisper talk wait stay follow help answer wonder remember believe listen happen dance play
drift hurry wander lean glance stare sigh shout murmur insist explain mention suggest agree accept
refuse admit discover notice expect imagine suppose hope wish fear love hate need use place drop
lift pull push press touch brush light fill empty close lock climb jump float sail land return
arrive enter wash cook serve pour mix gather scatter travel visit invite receive deliver carry
join leap slip
""".split()

_ADJECTIVES = """
old little white long great young small dark green good last new yellow first gray other warm
bright silent cold blue gold silver empty strange deep high low thin heavy soft hard quick slow
quiet loud sweet bitter rich poor early late careless vague faint broken tired happy sad lonely
curious gentle proud lazy ashamed polite rude wild calm sudden perfect simple plain clever foolish
pale pink red black brown clean dirty fresh damp dry wet hot cool sharp dull round square narrow
wide open private enormous tremendous distant familiar invisible expensive ordinary romantic
nervous serious honest
""".split()

_ADVERBS = """
then now again suddenly slowly quietly always never only almost still perhaps once already away
together alone back down over out home upstairs outside inside everywhere somewhere finally
usually eagerly politely vaguely abruptly carefully hastily evidently apparently tonight yesterday
""".split()

_PRONOUNS = """
he she I they we it you he she I
""".split()
_POSSESSIVES = """
his her the my their a the the its the a your our this that some every
""".split()
_PREPOSITIONS = """
of in to with at on from into by for over through toward under across behind beside along among
between against around beyond near without before after upon
""".split()
_CONJUNCTIONS = """
and but so because as when while until though if where
""".split()
_AUXILIARIES = """
was had could would were might must should did
""".split()
_NAMES = """
Nicholas Harriet Elizabeth Quentin Eleanor Mr. Xavier Jasper Bellamy Ursula Victor Yolanda Zachary
Kathleen Oswald Rosalind Lambert Ferdinand Agatha Clarence Dorothy Winifred Irving Gertrude
Percival Theodora Mortimer Sinclair Vandermeer Ashworth Holloway Templeton Whitcombe Radcliffe
Fairchild Pemberton
""".split()
_MARKED = (
    "No. {}", "at {} o'clock", "$ {} a week", "the year 19{}", "(which was {} years ago)",
    "room {}", "{} per cent", "a _{}_", "some {} miles",
)  # fmt: skip


class _Writer:
    """Draws words with Zipf's frequencies and strings them into sentences."""

    def __init__(self) -> None:
        self._random = random.Random(_SEED).random
        self._weights: dict[int, list[float]] = {}
        verbs = list(dict.fromkeys(_VERBS))
        nouns = list(dict.fromkeys(_NOUNS))
        adjectives = list(dict.fromkeys(_ADJECTIVES))
        # Derived words lengthen the tail of each class, as in any real text.
        self._nouns = nouns + [verb + "er" for verb in verbs if not verb.endswith("e")]
        self._plurals = [noun + "s" for noun in nouns if noun[-1] not in "sxyh"]
        self._pasts = [_past(verb) for verb in verbs]
        self._participles = [verb.removesuffix("e") + "ing" for verb in verbs]
        self._verbs = verbs
        self._adjectives = adjectives + [noun + "less" for noun in nouns[40:90]]
        self._adverbs = _ADVERBS + [word + "ly" for word in adjectives if word[-1] not in "ylde"]

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, words: Sequence[str]) -> str:
        """One of the words, the n-th with a frequency of about 1/(n + 3)."""
        weights = self._weights.get(len(words))
        if weights is None:
            weights = list(accumulate(1 / (rank + 3) for rank in range(len(words))))
            self._weights[len(words)] = weights
        return words[bisect(weights, self._random() * weights[-1], hi=len(words) - 1)]

    def number(self) -> str:
        """A number of two digits."""
        return f"{int(self._random() * 90) + 10}"

    def noun_phrase(self) -> str:
        if self.chance(0.08):
            return self.pick(_NAMES)
        words = [self.pick(_POSSESSIVES)]
        if self.chance(0.4):
            words.append(self.pick(self._adjectives))
        plural = words[0] not in ("a", "this", "that", "every") and self.chance(0.3)
        words.append(self.pick(self._plurals if plural else self._nouns))
        if words[0] == "a" and words[1][0] in "aeiou":
            words[0] = "an"
        if self.chance(0.22):
            words += [self.pick(_PREPOSITIONS), self.noun_phrase()]
        return " ".join(words)

    def clause(self) -> str:
        subject = self.pick(_PRONOUNS) if self.chance(0.55) else self.noun_phrase()
        words = [subject]
        if self.chance(0.25):
            auxiliary = self.pick(_AUXILIARIES)
            forms = {"was": self._participles, "were": self._participles, "had": self._pasts}
            words += [auxiliary, self.pick(forms.get(auxiliary, self._verbs))]
        else:
            words.append(self.pick(self._pasts))
        if self.chance(0.3):
            words.append(self.pick(self._adverbs))
        if self.chance(0.75):
            words += [self.pick(_PREPOSITIONS), self.noun_phrase()]
        if self.chance(0.12):
            words[-1] += f", {self.pick(self._participles)} {self.noun_phrase()}"
        if self.chance(0.03):
            words.append(self.pick(_MARKED).format(self.number()))
        return " ".join(words)

    def sentence(self) -> str:
        text = self.clause()
        if self.chance(0.45):
            link = self.pick(_CONJUNCTIONS)
            text += f", {link} {self.clause()}" if self.chance(0.5) else f" {link} {self.clause()}"
        if self.chance(0.06):
            text += f"{'; ' if self.chance(0.5) else ': '}{self.clause()}"
        if self.chance(0.04):
            text += f"-{self.clause()}"
        return text[0].upper() + text[1:]

    def speech(self) -> str:
        said = f"{self.pick(('said', 'asked', 'cried', 'answered'))} {self.pick(_NAMES)}"
        words = self.sentence()
        if self.chance(0.3):
            words = words.replace(" was ", " wasn't ").replace(" could ", " couldn't ")
        close = self.pick((",", "?", "!", ","))
        return f'"{words}{close}" {said}.'

    def paragraph(self) -> str:
        if self.chance(0.35):
            return self.speech()
        if self.chance(0.02):
            return self.sentence().upper() + "."
        return " ".join(self.sentence() + "." for _ in range(1 + int(self._random() * 6)))


def _past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeo":
        return verb[:-1] + "ied"
    return verb + "ed"


def gatsby_standin() -> bytes:
    """Plain ASCII text of `GATSBY_SIZE` bytes in which 77 byte values occur."""
    writer = _Writer()
    paragraphs: list[str] = []
    size = 0
    while size < GATSBY_SIZE:
        paragraphs.append(writer.paragraph())
        size += len(paragraphs[-1]) + 1
    text = "\n".join(paragraphs)[: GATSBY_SIZE - 2].rstrip("\n")
    return (text + ".\n" * (GATSBY_SIZE - len(text))).encode("ascii")[: GATSBY_SIZE - 1] + b"\n"


def id_stream(vocab_size: int, live: int) -> npt.NDArray[np.int64]:
    """Stream of token ids in which exactly `live` of `vocab_size` ids occur.

    Parameters
    ----------
    vocab_size, live : int
        ``1 <= live <= vocab_size``.

    Returns
    -------
    ndarray of int64
        `ID_STREAM_SIZE` ids, or `live` if that is more. The n-th most frequent one occurs about as
        often as 1/(n + 2.7), and every live one at least once.
    """
    bits = np.random.PCG64(_SEED).random_raw
    ids = np.argsort(bits(vocab_size), kind="stable")[:live]
    size = max(ID_STREAM_SIZE, live)
    cumulative = np.cumsum(1 / (np.arange(live) + 3.7))
    uniform = (bits(size - live) >> np.uint64(11)) * 2.0**-53
    drawn = ids[np.searchsorted(cumulative[:-1], uniform * cumulative[-1], side="right")]
    stream = np.concatenate([ids, drawn])
    return stream[np.argsort(bits(size), kind="stable")].astype(np.int64)
