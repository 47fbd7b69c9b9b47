"""Networks as `hush.models.build` and `hush train --model` find them, by one entry point each."""

from hush.models import Network, logistic
from hush_recipes.data import efficientnet
from hush_recipes.data.scattering import CHANNELS
from hush_recipes.models import networks, residual

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

mnist_cnn = Network(factory=networks.mnist_cnn, default_for=("mnist", "fashion-mnist"), shape=MNIST)
cifar_cnn = Network(factory=networks.cifar_cnn, default_for=("cifar10",), shape=CIFAR)
resnet22 = Network(factory=residual.resnet22, shape=CIFAR)
wrn_10_2 = Network(factory=residual.wrn_10_2, shape=CIFAR)
imdb_plain_lstm = Network(factory=networks.imdb_plain_lstm, shape=(None,), tokens=True)
imdb_lstm = Network(factory=networks.imdb_lstm, default_for=("imdb",), shape=(None,), tokens=True)
scattering_linear = Network(
    factory=networks.scattering_linear,
    default_for=("digits",),
    features="scattering",
    shape=(None, None, None),
    channels=CHANNELS,
)
scattering_mnist = Network(
    factory=networks.scattering_mnist,
    default_for=("mnist", "fashion-mnist"),
    features="scattering",
    shape=(81, 7, 7),
)
scattering_cifar = Network(
    factory=networks.scattering_cifar,
    default_for=("cifar10",),
    features="scattering",
    shape=(243, 8, 8),
)
efficientnet_linear = Network(
    factory=logistic,
    default_for=("digits", "mnist", "fashion-mnist", "cifar10"),
    features=efficientnet.NAME,
    shape=(efficientnet.FEATURES,),
)
