"""The text of examples/train.py, as bytes: short English stories that are made from a seed and count correctly.

The stories are made here, from the words below, so nothing is downloaded and no license applies. They are regular
enough that a small model learns to spell within a few hundred steps. After that the model can still learn who is
spoken of, and how many things there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

_PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jonas", "Lena", "Oscar"]
_SHE = {"Anna", "Clara", "Emma", "Greta", "Ida", "Lena"}
_THINGS = ["apple", "pear", "coin", "stone", "book", "egg", "nut", "shell", "candle", "stamp", "button"]
_PLACES = (
    "in the garden", "at the market", "on the beach", "in the kitchen", "by the river", "at school", "in the wood",
)  # fmt: skip
_TIMES = ["In the morning", "At noon", "In the evening", "On Monday", "On Friday", "In spring", "Last winter"]
_WEATHER = ["the sun shines", "it is raining", "a cold wind blows", "it is warm and quiet", "snow is falling"]
_CONTAINERS = ["basket", "box", "bag", "drawer", "bowl"]
_FEELINGS = ["happy", "tired", "proud", "surprised", "content", "hungry"]
_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip


class _Words:
    """Draws words. Only `random.random` is used, whose sequence for a seed is the same in all versions of Python."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, least: int, most: int) -> int:
        return least + int(self._random.random() * (most - least + 1))

    def one[T](self, of: Sequence[T]) -> T:
        return of[self.number(0, len(of) - 1)]

    def other[T](self, of: Sequence[T], but: T) -> T:
        while (word := self.one(of)) == but:
            pass
        return word


def _count(number: int, thing: str) -> str:
    return f"{_NUMBERS[number]} {thing}{'' if number == 1 else 's'}"


def _pronoun(person: str) -> str:
    return "she" if person in _SHE else "he"


def _gift(words: _Words) -> str:
    giver = words.one(_PEOPLE)
    taker, thing = words.other(_PEOPLE, giver), words.one(_THINGS)
    before = words.number(2, 10)
    given = words.number(1, before)
    return (
        f"{giver} has {_count(before, thing)}. {words.one(_TIMES)} {_pronoun(giver)} gives {_count(given, thing)} to "
        f"{taker}. Now {giver} has {_count(before - given, thing)}, and {taker} is {words.one(_FEELINGS)}."
    )


def _find(words: _Words) -> str:
    person, thing = words.one(_PEOPLE), words.one(_THINGS)
    before, found = words.number(1, 10), words.number(1, 10)
    return (
        f"There {'is' if before == 1 else 'are'} {_count(before, thing)} in the {words.one(_CONTAINERS)} of {person}. "
        f"{words.one(_PLACES).capitalize()} {_pronoun(person)} finds {_count(found, thing)} more. Together that makes "
        f"{_count(before + found, thing)}."
    )


def _walk(words: _Words) -> str:
    first = words.one(_PEOPLE)
    second, place = words.other(_PEOPLE, first), words.one(_PLACES)
    return (
        f'{words.one(_TIMES)}, when {words.one(_WEATHER)}, {first} meets {second} {place}. "Are you '
        f'{words.one(_FEELINGS)}?" asks {first}. "Yes, I am," says {second}, and they stay {place} for a while.'
    )


def _comparison(words: _Words) -> str:
    first, thing = words.one(_PEOPLE), words.one(_THINGS)
    second, mine = words.other(_PEOPLE, first), words.number(1, 10)
    theirs = words.other(range(1, 11), mine)
    richer = first if mine > theirs else second
    return (
        f"{first} counts {_count(mine, thing)}, {second} counts {_count(theirs, thing)}. So {richer} has "
        f"{_count(abs(mine - theirs), thing)} more."
    )


_STORIES: tuple[Callable[[_Words], str], ...] = (_gift, _find, _walk, _comparison)


def stories(size: int, seed: int) -> np.ndarray:
    """Returns `size` bytes (uint8) of stories, one per line. They depend on the seed only, not on the machine."""
    words, lines, length = _Words(f"stories {seed}"), [], 0
    while length < size:
        lines.append(words.one(_STORIES)(words) + "\n")
        length += len(lines[-1])
    return np.frombuffer("".join(lines).encode("ascii")[:size], np.uint8)


def batch(text: np.ndarray, seed: int, step: int, *, size: int, sequence: int) -> np.ndarray:
    """Returns the batch of a step, [size, sequence + 1] int32. The model predicts each column from those before it.

    The batch depends on (seed, step) only. So all processes have the same one, and checkpoints need no state of the
    data.
    """
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - sequence, size)
    return text[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
