from typing import Annotated

import pytest

from ubar_jax.registry import Choice, ConfigError, NoTraits, Number, Registry, split_spec

parts = Registry("part", given=1, traits=NoTraits)


@parts.register
def thing(x, size: Annotated[float, Number(0, 2)] = 1.0, mode: Choice(("a", "b")) = "a", other: str = "y"):
    """Does a thing."""
    return x, size, mode, other


def test_specs_are_parsed_with_defaults_positions_and_fills():
    assert str(parts.parse("thing")) == "thing(size=1.0, mode='a', other='y')"
    assert parts.parse("thing(2, mode=b)")(0) == (0, 2.0, "b", "y")
    assert parts.parse("thing", {"size": 0.5})(0)[1] == 0.5
    assert parts.parse("thing(size=2)", {"size": 0.5})(0)[1] == 2.0
    assert parts.parse("thing(1)") == parts.parse("thing(size=1.0)")


def test_a_nested_call_stays_a_spec():
    assert split_spec("sleeper(alie(z=1), start=-3)") == ("sleeper", ["alie(z=1)"], {"start": -3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thing(size=3)", r"size=3 is not allowed; size is a number in \[0, 2\]"),
        ("thing(size=True)", "size is a number"),
        ("thing(mode=c)", "mode is 'a' or 'b'"),
        ("thing(1, size=1)", "gives 'size' twice"),
        ("thing(1, 'a', 'y', 4)", "too many arguments"),
        ("thing(sise=1)", r"did you mean 'size'\?"),
        ("thang", r"did you mean 'thing'\?\); there are thing"),
        ("thing[0]", "malformed"),
        ("thing(*x)", "malformed"),
        ("thing(**x)", "malformed"),
        ("", "malformed"),
    ],
)
def test_what_cannot_be_understood_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parts.parse(text)


def test_the_listing_names_arguments_defaults_ranges_and_purpose():
    text = parts.listing()
    assert "thing(size=1.0, mode='a', other='y')" in text
    assert "Does a thing." in text and "size: a number in [0, 2]" in text


def test_unknown_traits_are_refused():
    with pytest.raises(ConfigError, match="no trait"):
        parts.register(thing, shape=3)
