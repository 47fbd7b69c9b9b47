import torch
from torch import nn

from hush.training.evaluate import evaluate


def test_it_is_the_mean_loss_and_accuracy_over_all_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.Linear(4, 2))
    inputs, targets = torch.randn(2500, 3), torch.randint(0, 2, (2500,))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    result = evaluate(model, nn.CrossEntropyLoss(), (inputs, targets))
    assert [module.training for module in model.modules()] == modes
    model.eval()
    outputs = model(inputs)
    torch.testing.assert_close(
        torch.tensor(result["loss"]), nn.functional.cross_entropy(outputs, targets).detach()
    )
    assert result["accuracy"] == (outputs.argmax(1) == targets).double().mean()


def test_regression_has_no_accuracy() -> None:
    result = evaluate(nn.Linear(3, 1), nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 1)))
    assert set(result) == {"loss"}
