"""The attacks: each gives every record a score, and a threshold found without knowing the answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from hush.accounting.pld.privacy_loss import Array
from hush.audit.membership.features import Records, confidences, inside, losses, posteriors
from hush.audit.roc import Estimate, Roc
from hush.core.errors import DataError

# Fewer shadow models than this do not tell a record's own spread (Carlini et al. 2022, section VI-B).
_OWN_SPREAD = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What an attack says of members and of others: who is above the threshold is called a member."""

    name: str
    roc: Roc
    threshold: float

    def accuracy(self, confidence: float = 0.95) -> Estimate:
        """How often it is right, at even odds."""
        return self.roc.accuracy(self.threshold, confidence)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Records of whom the attacker is to say whether the model was trained on them: as many of each."""

    members: Records
    others: Records

    def __post_init__(self) -> None:
        if len(self.members[1]) != len(self.others[1]):
            raise DataError(
                f"{len(self.members[1])} members and {len(self.others[1])} others: the odds are to be "
                "even. Leave some out."
            )

    @classmethod
    def of(cls, x: Tensor, y: Tensor, members: Tensor, others: Tensor) -> "Candidates":
        """Those of these indices, as many members as others."""
        many = min(len(members), len(others))
        picked = ((x[rows[:many]], y[rows[:many]]) for rows in (members, others))
        return cls(members=next(picked), others=next(picked))


def loss_threshold(model: nn.Module, asked: Candidates, shadow: nn.Module, own: Candidates) -> Verdict:
    """A small loss means a member (Yeom et al. 2018); how small, a shadow model tells."""
    return Verdict(
        name="loss threshold",
        roc=Roc(-losses(model, asked.members), -losses(model, asked.others)),
        threshold=Roc(-losses(shadow, own.members), -losses(shadow, own.others)).best_threshold,
    )


def black_box_shadow(model: nn.Module, asked: Candidates, shadow: nn.Module, own: Candidates) -> Verdict:
    """A classifier of posteriors and correctness, trained on a shadow model (paper 001, 6.4.1)."""
    judge = _classifier(posteriors(shadow, own.members), posteriors(shadow, own.others))
    return Verdict(
        name="black-box/shadow",
        roc=Roc(judge(posteriors(model, asked.members)), judge(posteriors(model, asked.others))),
        threshold=0.0,
    )


def white_box_partial(model: nn.Module, asked: Candidates, known: Candidates) -> Verdict:
    """A classifier of what is seen inside, trained on members and others that are known (001, 6.4.1)."""
    judge = _classifier(inside(model, known.members), inside(model, known.others))
    return Verdict(
        name="white-box/partial",
        roc=Roc(judge(inside(model, asked.members)), judge(inside(model, asked.others))),
        threshold=0.0,
    )


def lira(model: nn.Module, asked: Candidates, shadows: Sequence[nn.Module]) -> Verdict:
    """The likelihood-ratio attack, offline (Carlini et al. 2022): is the model surer than those without?

    None of the shadow models has seen any of the candidates. A record's score is how far its confidence
    lies above theirs, in standard deviations of a normal law fitted to them. Half of the candidates are
    members, which the attacker knows: the threshold is the median.
    """
    if not shadows:
        raise DataError(
            "no shadow models: what a model says of records it has not seen must be known to tell those "
            "that it has. Train at least one."
        )
    found: list[Array] = []
    for records in (asked.members, asked.others):
        without = np.stack([confidences(shadow, records) for shadow in shadows])
        found.append(np.stack([confidences(model, records) - without.mean(0), without.std(0)]))
    (members, spread), (others, other_spread) = found
    if len(shadows) >= _OWN_SPREAD:
        members, others = members / (spread + 1e-12), others / (other_spread + 1e-12)
    every = np.concatenate([members, others])
    return Verdict(name="LiRA, offline", roc=Roc(members, others), threshold=float(np.median(every)))


class _Judge:
    """The log-odds that a record is a member."""

    def __init__(self, fitted: object) -> None:
        self._fitted = fitted

    def __call__(self, features: Array) -> Array:
        return np.asarray(self._fitted.decision_function(features))  # type: ignore[attr-defined]


def _classifier(members: Array, others: Array) -> _Judge:
    """Boosted trees: they need no scaling of what they are given."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    fitted = HistGradientBoostingClassifier(
        max_iter=60, learning_rate=0.1, max_leaf_nodes=15, l2_regularization=1.0, random_state=0
    )
    truth = np.repeat([1, 0], [len(members), len(others)])
    return _Judge(fitted.fit(np.concatenate([members, others]), truth))
