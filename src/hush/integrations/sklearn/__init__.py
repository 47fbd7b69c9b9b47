"""scikit-learn estimators with a differentially private fit. See docs/sklearn.md."""

from hush.integrations.sklearn.estimators import PrivateClassifier, PrivateRegressor
from hush.schema import Categorical, Numeric

__all__ = ["Categorical", "Numeric", "PrivateClassifier", "PrivateRegressor"]
