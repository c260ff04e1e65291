"""Units and things counted, by one name each. Nothing is converted: 10 m is no answer to "how many cm are 10 m?"."""

from __future__ import annotations

import re

_ALIASES = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram gm",
    "kg": "kilogram kgs",
    "mg": "milligram",
    "lb": "pound lbs",
    "oz": "ounce",
    "ton": "tonne",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "days",
    "week": "wk weeks",
    "year": "yr yrs",
    "L": "liter litre l",
    "mL": "milliliter millilitre ml",
    "gal": "gallon",
    "dollar": "usd bucks",
    "cent": "cents ¢",
    "euro": "eur",
    "degree": "deg degs",
    "celsius": "centigrade",
    "rad": "radian",
    "am": "a.m. a.m",
    "pm": "p.m. p.m",
    "mi/h": "mph",
    "km/h": "kmh kph kmph",
    "man": "men",
    "woman": "women",
    "child": "children",
    "person": "people",
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in [name, *aliases.split()]}
PLAIN_UNITS = {name for name in _CANONICAL if 2 <= len(name) <= 3 and name.isalpha()} | {"cc", "kW", "Hz", "sq"}
"""Short letter runs that are units when they follow a number without any mark-up."""

MULTIPLIERS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SAYS_NOTHING = {"unit", "units"}
# Words that change the value, or show that this is a sentence.
_CHANGES = (
    "not or to plus minus times over half halves third thirds fourth fourths quarter quarters fifth fifths fold "
    "sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths twelfth twelfths hundredth hundredths "
    "thousandth thousandths millionth millionths tens hundreds thousands millions billions trillions dozens doz "
    "gross score lakh lakhs crore crores bn mn mln kilo mega giga milli micro nano ppm bps factorial mod modulo "
    "choose divided multiplied pi e i squared cubed sqrt alpha beta theta log ln sin cos tan x y z n"
)
_SENTENCE = (
    "than more less least most negative approximately about approx around if when where is are was equals equal "
    "into remainder otherwise only either but maybe perhaps possibly even odd prime true false yes no unknown zero "
    "out below k j undefined none root frac infinity infinite nothing answer wrong incorrect gamma delta epsilon "
    "zeta eta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega exp doubled tripled halved twice thrice "
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
_CHANGES_VALUE = set(_CHANGES.split())
_NO_UNIT = (_CHANGES_VALUE | set(_SENTENCE.split())) - set("xyzn")
_WORD = re.compile(r"[^\W\d_]+\.?(?:[^\W\d_]+\.?)*|\^-?\d+|\d|/|¢")


def unit_name(text: str) -> str | None:
    """The canonical name; "" for words like "units" that name none; None where the words are no unit.

    Args:
        text: what stands behind a value: `cm^2`, `square centimeters`, `m/s`, `meters per second`, `apples`.
    """
    text = re.sub(r"\b(?:of|the|a|an|each)\b|[-(),']", " ", text)
    words = _WORD.findall(text)
    if re.sub(r"\s", "", "".join(words)) != re.sub(r"\s", "", text).replace("*", "") or len(words) > 8:
        return None
    if re.search(r"\bper\s+cents?\b", text, re.IGNORECASE):
        return None
    parts: list[str] = []
    power = ""
    for word in words:
        lower = word.lower().rstrip(".")
        if lower in ("square", "sq", "cubic", "cu"):
            power = "^2" if lower.startswith("sq") else "^3"
        elif lower in ("squared", "cubed") and parts and parts[-1] in _ALIASES:
            parts[-1] += "^2" if lower == "squared" else "^3"
        elif word.startswith("^") or word.isdigit():
            if not parts or parts[-1] == "/" or (word.isdigit() and parts[-1] not in _ALIASES):
                return None
            parts[-1] += word if word.startswith("^") else f"^{word}"
        elif lower in ("per", "/"):
            parts.append("/")
        elif lower in _NO_UNIT:
            return None
        else:
            parts.append(_one(word) + power)
            power = ""
    if parts and parts[0] == "degree" and len(parts) > 1:  # "degrees Celsius" is "Celsius", degrees an angle
        parts = parts[1:]
    named = [p for p in parts if p.split("^")[0] not in _SAYS_NOTHING]
    return re.sub(r" ?/ ?", "/", " ".join(named))


def _one(word: str) -> str:
    bare = word.rstrip(".") if word.lower() not in _CANONICAL else word
    for candidate in (bare, bare.lower(), bare.lower().removesuffix("s"), bare.lower().removesuffix("es")):
        if candidate in _CANONICAL:
            return _CANONICAL[candidate]
    lower = bare.lower()
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower


def changes_value(word: str) -> bool:
    """Whether a word behind a number makes it another number, or no answer: `5 squared`, `2 pi`, `5 or`."""
    return word.lower() in _CHANGES_VALUE
