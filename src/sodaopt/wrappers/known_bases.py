"""Facts about other optimizers, and the checks that use them.

The table is written by `python -m tools.known_bases`, which runs each installed optimizer from two
points with the same gradients.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import LBFGS, Optimizer

from sodaopt.core.optimizer import SODA

# The update of these optimizers does not depend on the weights. For any other base the wrapper
# computes the pull before the step and adds it afterwards. That is exact for every base, and costs
# one temporary copy.
NON_READERS: frozenset[str] = frozenset(
    (
        # table:begin
        "lion_pytorch.lion_pytorch.Lion",
        "muon.SingleDeviceMuon",
        "muon.SingleDeviceMuonWithAuxAdam",
        "pytorch_optimizer.optimizer.adabelief.AdaBelief",
        "pytorch_optimizer.optimizer.adabound.AdaBound",
        "pytorch_optimizer.optimizer.adadelta.AdaDelta",
        "pytorch_optimizer.optimizer.adagc.AdaGC",
        "pytorch_optimizer.optimizer.adai.Adai",
        "pytorch_optimizer.optimizer.adamax.AdaMax",
        "pytorch_optimizer.optimizer.adamc.AdamC",
        "pytorch_optimizer.optimizer.adamg.AdamG",
        "pytorch_optimizer.optimizer.adamod.AdaMod",
        "pytorch_optimizer.optimizer.adams.AdamS",
        "pytorch_optimizer.optimizer.adamw.StableAdamW",
        "pytorch_optimizer.optimizer.adan.Adan",
        "pytorch_optimizer.optimizer.adanorm.AdaNorm",
        "pytorch_optimizer.optimizer.adapnm.AdaPNM",
        "pytorch_optimizer.optimizer.adashift.AdaShift",
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "pytorch_optimizer.optimizer.ademamix.SimplifiedAdEMAMix",
        "pytorch_optimizer.optimizer.adopt.ADOPT",
        "pytorch_optimizer.optimizer.aggmo.AggMo",
        "pytorch_optimizer.optimizer.aida.Aida",
        "pytorch_optimizer.optimizer.ano.Ano",
        "pytorch_optimizer.optimizer.apollo.APOLLO",
        "pytorch_optimizer.optimizer.apollo.ApolloDQN",
        "pytorch_optimizer.optimizer.avagrad.AvaGrad",
        "pytorch_optimizer.optimizer.bcos.BCOS",
        "pytorch_optimizer.optimizer.came.CAME",
        "pytorch_optimizer.optimizer.conda.Conda",
        "pytorch_optimizer.optimizer.dadapt.DAdaptAdam",
        "pytorch_optimizer.optimizer.dadapt.DAdaptAdan",
        "pytorch_optimizer.optimizer.dadapt.DAdaptLion",
        "pytorch_optimizer.optimizer.dash.DASH",
        "pytorch_optimizer.optimizer.diffgrad.DiffGrad",
        "pytorch_optimizer.optimizer.dual_adam.DualAdam",
        "pytorch_optimizer.optimizer.emonavi.EmoFact",
        "pytorch_optimizer.optimizer.emonavi.EmoLynx",
        "pytorch_optimizer.optimizer.emonavi.EmoNavi",
        "pytorch_optimizer.optimizer.exadam.EXAdam",
        "pytorch_optimizer.optimizer.fira.Fira",
        "pytorch_optimizer.optimizer.flash_adamw.FlashAdamW",
        "pytorch_optimizer.optimizer.galore.GaLore",
        "pytorch_optimizer.optimizer.grams.Grams",
        "pytorch_optimizer.optimizer.gravity.Gravity",
        "pytorch_optimizer.optimizer.grokfast.GrokFastAdamW",
        "pytorch_optimizer.optimizer.kate.Kate",
        "pytorch_optimizer.optimizer.laprop.LaProp",
        "pytorch_optimizer.optimizer.lion.Lion",
        "pytorch_optimizer.optimizer.magma.Magma",
        "pytorch_optimizer.optimizer.mars.MARS",
        "pytorch_optimizer.optimizer.msvag.MSVAG",
        "pytorch_optimizer.optimizer.muon.adamuon.AdaMuon",
        "pytorch_optimizer.optimizer.muon.muon.Muon",
        "pytorch_optimizer.optimizer.muon.muon_clip.MuonClip",
        "pytorch_optimizer.optimizer.muon.normuon.NorMuon",
        "pytorch_optimizer.optimizer.novograd.NovoGrad",
        "pytorch_optimizer.optimizer.padam.PAdam",
        "pytorch_optimizer.optimizer.pid.PID",
        "pytorch_optimizer.optimizer.pnm.PNM",
        "pytorch_optimizer.optimizer.psgd.Kron",
        "pytorch_optimizer.optimizer.qhadam.QHAdam",
        "pytorch_optimizer.optimizer.qhm.QHM",
        "pytorch_optimizer.optimizer.racs.Alice",
        "pytorch_optimizer.optimizer.racs.RACS",
        "pytorch_optimizer.optimizer.radam.RAdam",
        "pytorch_optimizer.optimizer.rose.ROSE",
        "pytorch_optimizer.optimizer.sara.SaRA",
        "pytorch_optimizer.optimizer.scion.SCION",
        "pytorch_optimizer.optimizer.scion.SCIONLight",
        "pytorch_optimizer.optimizer.sgd.SGDSaI",
        "pytorch_optimizer.optimizer.sgd.SGDW",
        "pytorch_optimizer.optimizer.sgd.SignSGD",
        "pytorch_optimizer.optimizer.sgd.VSGD",
        "pytorch_optimizer.optimizer.shampoo.ScalableShampoo",
        "pytorch_optimizer.optimizer.shampoo.Shampoo",
        "pytorch_optimizer.optimizer.sm3.SM3",
        "pytorch_optimizer.optimizer.snsm.AdamWSN",
        "pytorch_optimizer.optimizer.soap.SOAP",
        "pytorch_optimizer.optimizer.spam.SPAM",
        "pytorch_optimizer.optimizer.spam.StableSPAM",
        "pytorch_optimizer.optimizer.splus.SPlus",
        "pytorch_optimizer.optimizer.swats.SWATS",
        "pytorch_optimizer.optimizer.tam.AdaTAM",
        "pytorch_optimizer.optimizer.tam.TAM",
        "pytorch_optimizer.optimizer.tiger.Tiger",
        "pytorch_optimizer.optimizer.yogi.Yogi",
        "torch.optim.Muon",
        "torch.optim.adadelta.Adadelta",
        "torch.optim.adagrad.Adagrad",
        "torch.optim.adam.Adam",
        "torch.optim.adamax.Adamax",
        "torch.optim.adamw.AdamW",
        "torch.optim.nadam.NAdam",
        "torch.optim.radam.RAdam",
        "torch.optim.rmsprop.RMSprop",
        "torch.optim.rprop.Rprop",
        "torch.optim.sgd.SGD",
        # table:end
        "sodaopt.core.optimizer.SODA",
    )
)

# Group keys of a weight decay, and the value that turns it off.
DECAYS: dict[str, object] = {
    "weight_decay": 0,
    "wd": 0,
    "weight_decay_1d": 0,
    "constraint": False,
    "unconstrained": True,
}


def check_base(base: Any, wrapper: str) -> None:
    """Raise if the optimizer cannot be wrapped."""
    name = type(base).__name__
    if isinstance(base, type):
        raise TypeError(
            f"{wrapper} wraps an optimizer, not a class: {wrapper}.of({base.__name__})(params)"
        )
    if isinstance(getattr(base, "base", None), Optimizer):
        raise TypeError(
            f"{wrapper} cannot wrap a {name}, which is a wrapper itself: wrap the optimizer inside "
            "it, or use a row such as SODA(params, lr, zoo.soda(zoo.adam())) as the base"
        )
    if not isinstance(base, Optimizer):
        raise TypeError(f"{wrapper} wraps a torch.optim.Optimizer, got {name}")
    step = inspect.signature(type(base).step).parameters
    closure = list(step.values())[1] if len(step) > 1 else None
    if isinstance(base, LBFGS) or (closure is not None and closure.default is closure.empty):
        raise TypeError(
            f"{name} evaluates the loss several times a step, at points of its own: there is no "
            "one update to add the pull to"
        )
    averages = (
        any(m.keeps_x or m.keeps_z for m in base.methods.values())
        if isinstance(base, SODA)
        else callable(getattr(base, "eval", None))
    )
    if averages:
        raise TypeError(f"{name} averages its iterates itself: wrap the optimizer inside it")
