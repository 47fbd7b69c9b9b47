"""Membership inference attacks: a score for every record, and a threshold set without the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hush.audit.lower_bound import Array
from hush.core.errors import DataError
from hush.gradients.recording import record
from hush_recipes.dpsur.roc import Estimate, Roc

# Fewer shadow models than this do not tell a record's own spread (Carlini et al. 2022, section VI-B).
_OWN_SPREAD = 16
_SHARES = 6
_BATCH = 512
_EMBEDDED = 64
"""Features of an embedding; a longer one is projected on as many random directions."""
Records = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Indices of four disjoint parts, 2:1:2:1 (DPSUR paper, section 6.4.2)."""

    target_train: Tensor
    target_test: Tensor
    shadow_train: Tensor
    shadow_test: Tensor

    @property
    def shadow(self) -> Tensor:
        """All that the attacker has."""
        return torch.cat([self.shadow_train, self.shadow_test])


def split(records: int, generator: torch.Generator) -> Split:
    """The records in random order, a third, a sixth, a third and a sixth of them; a rest is left out."""
    if records < 4 * _SHARES:
        raise DataError(
            f"{records} records: split 2:1:2:1 some part would have next to none, and no attack could "
            f"be measured. Pass at least {4 * _SHARES}."
        )
    share = records // _SHARES
    order = torch.randperm(records, generator=generator)[: _SHARES * share]
    train, test, own_train, own_test = order.split([2 * share, share, 2 * share, share])
    return Split(target_train=train, target_test=test, shadow_train=own_train, shadow_test=own_test)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Records whose membership in the training set is attacked: as many members as others."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """Scores of an attack, and the threshold above which a record is called a member."""

    name: str
    roc: Roc
    threshold: float

    def accuracy(self, confidence: float = 0.95) -> Estimate:
        """How often it is right, at even odds."""
        return self.roc.accuracy(self.threshold, confidence)


def loss_threshold(
    model: nn.Module, candidates: Candidates, shadow: nn.Module, own: Candidates
) -> Verdict:
    """A small loss means a member (Yeom et al. 2018); the threshold is a shadow model's."""
    return Verdict(
        name="loss threshold",
        roc=Roc(-losses(model, candidates.members), -losses(model, candidates.others)),
        threshold=Roc(-losses(shadow, own.members), -losses(shadow, own.others)).best_threshold,
    )


def black_box_shadow(
    model: nn.Module, candidates: Candidates, shadow: nn.Module, own: Candidates
) -> Verdict:
    """A classifier of posteriors and correctness, trained on a shadow model (DPSUR, 6.4.1)."""
    log_odds = _classifier(posteriors(shadow, own.members), posteriors(shadow, own.others))
    members, others = (
        log_odds(posteriors(model, part)) for part in (candidates.members, candidates.others)
    )
    return Verdict(name="black-box/shadow", roc=Roc(members, others), threshold=0.0)


def white_box_partial(model: nn.Module, candidates: Candidates, labelled: Candidates) -> Verdict:
    """A classifier of white-box features, trained on some members and others (001, 6.4.1)."""
    log_odds = _classifier(
        white_box_features(model, labelled.members), white_box_features(model, labelled.others)
    )
    members, others = (
        log_odds(white_box_features(model, part)) for part in (candidates.members, candidates.others)
    )
    return Verdict(name="white-box/partial", roc=Roc(members, others), threshold=0.0)


def lira(model: nn.Module, candidates: Candidates, shadows: Sequence[nn.Module]) -> Verdict:
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
    scores: list[Array] = []
    for records in (candidates.members, candidates.others):
        without = np.stack([confidences(shadow, records) for shadow in shadows])
        excess = confidences(model, records) - without.mean(0)
        scores.append(excess / (without.std(0) + 1e-12) if len(shadows) >= _OWN_SPREAD else excess)
    median = float(np.median(np.concatenate(scores)))
    return Verdict(name="LiRA, offline", roc=Roc(*scores), threshold=median)


def _classifier(members: Array, others: Array) -> Callable[[Array], Array]:
    """Log-odds of membership by boosted trees, which need no scaling of their features."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    trees = HistGradientBoostingClassifier(
        max_iter=60, learning_rate=0.1, max_leaf_nodes=15, l2_regularization=1.0, random_state=0
    )
    trees.fit(np.concatenate([members, others]), np.repeat([1, 0], [len(members), len(others)]))
    decision: Callable[[Array], Array] = trees.decision_function
    return decision


@torch.no_grad()
def logits(model: nn.Module, records: Records) -> Tensor:
    """Scores of the classes, in double precision, without dropout."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = [model(part.to(device)).double().cpu() for part in records[0].split(_BATCH)]
    finally:
        model.train(training)
    return torch.cat(parts)


def losses(model: nn.Module, records: Records) -> Array:
    """Each record's cross-entropy."""
    scores, labels = logits(model, records), records[1].cpu()
    return nn.functional.cross_entropy(scores, labels, reduction="none").numpy()


def confidences(model: nn.Module, records: Records) -> Array:
    """log p - log(1 - p) of the probability p of the right class (Carlini et al. 2022).

    As a difference of logarithms of sums: 1 - p is 0 in floating point long before it is.
    """
    scores, labels = logits(model, records), records[1].cpu()[:, None]
    right = scores.gather(1, labels)[:, 0]
    wrong = scores.scatter(1, labels, -torch.inf).logsumexp(1)
    return (right - wrong).numpy()


def posteriors(model: nn.Module, records: Records) -> Array:
    """Black-box features: sorted log-probabilities, and whether the largest is the right one's."""
    scores = logits(model, records)
    logs = scores.log_softmax(1).sort(1, descending=True).values
    correct = (scores.argmax(1) == records[1].cpu()).double()[:, None]
    return torch.cat([logs, correct], dim=1).numpy()


def white_box_features(model: nn.Module, records: Records) -> Array:
    """White-box features: posteriors, label, loss, gradient norms by parameter, and the embedding.

    The last layer's gradient itself is a function of these: the error times the embedding.
    """
    device = next(model.parameters()).device
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    embedded: list[Tensor] = []
    norms: list[Tensor] = []
    # removed while the tape runs, which works on its own copies
    handle = last.register_forward_pre_hook(lambda _, args: embedded.append(args[0].double().cpu()))
    try:
        logits(model, records)
    finally:
        handle.remove()
    per_sample = nn.CrossEntropyLoss(reduction="none")
    for x, y in zip(records[0].split(_BATCH), records[1].split(_BATCH), strict=True):
        tape = record(model, per_sample, x.to(device), y.to(device))
        by_parameter = tape.norms_by_parameter(2.0).values()
        norms.append(torch.stack([norm.double().cpu() for norm in by_parameter], dim=1))
    embedding = torch.cat(embedded).flatten(1)
    if embedding.shape[1] > _EMBEDDED:
        directions = torch.Generator().manual_seed(0)
        onto = torch.randn(embedding.shape[1], _EMBEDDED, generator=directions, dtype=torch.float64)
        embedding = embedding @ onto / _EMBEDDED**0.5
    parts = [
        torch.from_numpy(posteriors(model, records)),
        records[1].cpu().double()[:, None],
        torch.from_numpy(losses(model, records))[:, None],
        torch.cat(norms).clamp_min(1e-300).log(),
        embedding,
    ]
    return torch.cat(parts, dim=1).numpy()
