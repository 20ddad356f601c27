r"""Patterns that cut text into words, known to take linear time.

Whether a pattern runs away on some text cannot be told by looking at it in general, but the field uses a few,
each the one its vocabulary was learned with. None of these repeats what is itself repeated, and where two
repetitions meet, one gives characters back to the other at most once per run (as in `\s+(?!\S)`).
"""

from __future__ import annotations

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS_SPELLED = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"'(?i:[sdmt]|ll|ve|re)",
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{_UPPER}*{_LOWER}+{suffix}|{before}{_UPPER}+{_LOWER}*{suffix}"


def _gpt4_like() -> set[str]:
    """cl100k, Llama 3, Qwen 2 and 3, GLM 4, SmolLM 3, Granite, ...: they differ in digits and marks."""
    return {
        f"{contractions}|{_WORD}|{digits}|{_SIGNS}|{_SPACES}"
        for contractions in (_CONTRACTIONS, *_CONTRACTIONS_SPELLED)
        for digits in (r"\p{N}", r"\p{N}{1,2}", r"\p{N}{1,3}")
    }


_CL100K_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
_QWEN_WITH_MARKS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = _cased("") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_O200K = {
    _cased(contractions + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
    for contractions in (_CONTRACTIONS, _CONTRACTIONS_SPELLED[0])
}
_DEEPSEEK_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_SINGLE_CLASSES = {
    *(r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r"\d", r"\d{1,3}", r"\d+", r"[0-9]", r"[0-9]+", r"[0-9]{1,3}"),
    *(r"[0-9][0-9][0-9]", r"[\r\n]", r"\s", r"\s+", " ", " +", " {2,}", r"\n", r"\n+", r"\p{P}", r"\p{P}+"),
    *(r"\s?\p{L}+", r"\s?\p{P}+", r"[\p{P}\$\+<=>\^~\|`]+", r"[\p{P}\$\+<=>\^~\|]+", r"\w+|[^\w\s]+"),
    *("[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+", r"\S+", "[^ ]+", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
}

_LINEAR: frozenset[str] = frozenset(
    {_GPT2, _CL100K_POSSESSIVE, _QWEN_WITH_MARKS, _TEKKEN, _DEEPSEEK_WORDS}
    | _gpt4_like()
    | _O200K
    | _SINGLE_CLASSES
)


def is_linear(pattern: str) -> bool:
    """Whether a pattern is one of these. Some files spell line ends as themselves."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n") in _LINEAR
