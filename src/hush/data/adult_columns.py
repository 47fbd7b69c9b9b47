"""The columns of the Adult table, as its description (adult.names) lists them.

Limits are round numbers or the census' own codes (99 hours, 16 levels of education, 99,999
dollars), so that scaling reads nothing off the records.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A number that is at most `limit`, on a logarithmic scale where it spans decades."""

    name: str
    limit: float
    logarithm: bool = False


@dataclass(frozen=True)
class Categories:
    """One of a public list of values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Dropped:
    """A column that is not used."""

    name: str


def _categories(name: str, values: str) -> Categories:
    return Categories(name, tuple(values.split()))


UNKNOWN = "?"
LABELS = ("<=50K", ">50K")

COLUMNS: tuple[Measure | Categories | Dropped, ...] = (
    Measure("age", 100),
    _categories(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    ),
    # How many people the census thinks a row stands for: tells nothing about the person.
    Dropped("fnlwgt"),
    _categories(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Measure("education-num", 16),
    _categories(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
    ),
    _categories(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces",
    ),
    _categories("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _categories("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _categories("sex", "Female Male"),
    Measure("capital-gain", 99_999, logarithm=True),
    Measure("capital-loss", 99_999, logarithm=True),
    Measure("hours-per-week", 99),
    _categories(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
    ),
)
