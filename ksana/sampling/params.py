"""Checking sampling parameters: every field is honoured or refused with a text that names it."""

from __future__ import annotations

import math

from ksana.errors import RequestError
from ksana.messages.requests import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 1000
"""Characters."""
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 100.0


def validate(sampling: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError (400, with `param`) unless every field is one that we can honour.

    Checks types too, as in-process callers can put anything in. Whether prompt plus max_tokens fits the
    context is checked where the prompt's length is known.
    """
    _check_int("seed", sampling.seed, 0, 2**64 - 1)
    _check_float("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _check_int("top_k", sampling.top_k, 0, vocab_size, "; 0 turns it off")
    _check_float("top_p", sampling.top_p, 0.0, 1.0)
    _check_float("min_p", sampling.min_p, 0.0, 1.0)
    _check_lengths(sampling, max_model_len)
    _check_stops(sampling, vocab_size)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(sampling, name), bool):
            raise _error(name, f"{name} must be true or false, not {_shown(getattr(sampling, name))}")


def _check_lengths(sampling: SamplingParams, max_model_len: int) -> None:
    if sampling.max_tokens is not None:
        _check_int("max_tokens", sampling.max_tokens, 1, max_model_len, " (the context's length)")
    _check_int("min_tokens", sampling.min_tokens, 0, max_model_len, " (the context's length)")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise _error(
            "min_tokens",
            f"min_tokens ({sampling.min_tokens}) must not be above max_tokens ({sampling.max_tokens})",
        )


def _check_stops(sampling: SamplingParams, vocab_size: int) -> None:
    stop = sampling.stop
    if not isinstance(stop, tuple | list) or not all(isinstance(text, str) for text in stop):
        raise _error("stop", "stop must be a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise _error("stop", f"stop may hold at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_STRING_LEN:
            raise _error(
                "stop", f"a stop string must have 1 to {MAX_STOP_STRING_LEN} characters, not {len(text)}"
            )
    token_ids = sampling.stop_token_ids
    if not isinstance(token_ids, tuple | list):
        raise _error("stop_token_ids", "stop_token_ids must be a list of token ids")
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise _error(
            "stop_token_ids",
            f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, not {len(token_ids)}",
        )
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, 0, vocab_size - 1, " (the vocabulary's last id)")


def _check_int(param: str, value: object, low: int, high: int, remark: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _error(param, f"{param} must be an integer, not {_shown(value)}")
    if not low <= value <= high:
        raise _error(param, f"{param} must be between {low} and {high}{remark}, not {_shown(value)}")


def _check_float(param: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _error(param, f"{param} must be a number, not {_shown(value)}")
    # An int may be too large for a float; comparing it is safe, math.isfinite is not.
    if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
        raise _error(param, f"{param} must be between {low:g} and {high:g}, not {_shown(value)}")


def _shown(value: object) -> str:
    """A value for an error text, cut to a harmless length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 128 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _error(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
