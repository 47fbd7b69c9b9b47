"""Every recipe by its name."""

from collections.abc import Callable

from recipes.audit.mechanisms import audit_mechanisms
from recipes.bounded.fig1 import bounded_fig1
from recipes.bounded.fig2 import bounded_fig2
from recipes.bounded.fig3 import bounded_fig3
from recipes.bounded.fig3_cifar10 import bounded_fig3_cifar10
from recipes.bounded.fig4 import bounded_fig4
from recipes.bounded.fig4_cifar10 import bounded_fig4_cifar10
from recipes.bounded.sampling import bounded_sampling
from recipes.dpsur.acceptance import dpsur_fig5, dpsur_fig6
from recipes.dpsur.attacks import dpsur_table3, dpsur_table4
from recipes.dpsur.fig9 import dpsur_fig9
from recipes.dpsur.table2 import (
    dpsur_table2,
    dpsur_table2_cifar10,
    dpsur_table2_imdb,
    dpsur_table2_mnist,
)
from recipes.figure import Figure
from recipes.gg.dimension import gg_dimension
from recipes.gg.fig2 import gg_fig2
from recipes.gg.fig3 import gg_fig3
from recipes.gg.fig4 import gg_fig4, gg_fig4_cifar10, gg_fig4_imdb
from recipes.gg.fig5 import gg_fig5
from recipes.gg.fig8 import gg_fig8
from recipes.gg.fig9 import gg_fig9
from recipes.gg.fig10 import gg_fig10
from recipes.gg.table1 import gg_table1
from recipes.twice.cosine import twice_cosine
from recipes.twice.fig2 import twice_fig2
from recipes.twice.fig3 import twice_fig3
from recipes.twice.fig4 import twice_fig4
from recipes.twice.fig5 import twice_fig5
from recipes.twice.section6 import twice_section6
from recipes.twice.table1 import twice_table1
from recipes.twice.table2 import twice_table2
from recipes.twice.training import twice_training

RECIPES: dict[str, Callable[..., Figure]] = {
    "gg-dimension": gg_dimension,
    "gg-fig2": gg_fig2,
    "gg-fig3": gg_fig3,
    "gg-fig4": gg_fig4,
    "gg-fig4-cifar10": gg_fig4_cifar10,
    "gg-fig4-imdb": gg_fig4_imdb,
    "gg-fig5": gg_fig5,
    "gg-fig8": gg_fig8,
    "gg-fig9": gg_fig9,
    "gg-fig10": gg_fig10,
    "bounded-fig1": bounded_fig1,
    "bounded-fig2": bounded_fig2,
    "bounded-fig3": bounded_fig3,
    "bounded-fig4": bounded_fig4,
    "bounded-fig3-cifar10": bounded_fig3_cifar10,
    "bounded-fig4-cifar10": bounded_fig4_cifar10,
    "bounded-sampling": bounded_sampling,
    "twice-cosine": twice_cosine,
    "twice-fig2": twice_fig2,
    "twice-fig3": twice_fig3,
    "twice-fig4": twice_fig4,
    "twice-fig5": twice_fig5,
    "twice-section6": twice_section6,
    "twice-table1": twice_table1,
    "twice-table2": twice_table2,
    "twice-training": twice_training,
    "gg-table1": gg_table1,
    "dpsur-fig5": dpsur_fig5,
    "dpsur-fig6": dpsur_fig6,
    "dpsur-fig9": dpsur_fig9,
    "dpsur-table2": dpsur_table2,
    "dpsur-table2-mnist": dpsur_table2_mnist,
    "dpsur-table2-cifar10": dpsur_table2_cifar10,
    "dpsur-table2-imdb": dpsur_table2_imdb,
    "audit-mechanisms": audit_mechanisms,
    "dpsur-table3": dpsur_table3,
    "dpsur-table4": dpsur_table4,
}
