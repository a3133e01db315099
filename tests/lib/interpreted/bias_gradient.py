"""The pass that computes a bias's gradient, executed by the interpreter of PTX, and compared with the oracle."""

import random
from typing import Any

import torch

from flash_attn_cute.backends.cute.backend import Launch
from flash_attn_cute.backends.cute.plan import BiasGradientPlan, plan_bias_gradient
from flash_attn_cute.problem.spec import AttentionSpec
from lab import interpreter
from tests.lib.interpreted.backward import Interpreted, check
from tests.lib.interpreted.common import B200, Executed
from tests.lib.oracle import Call


class WithGradient(Interpreted):
    """The backend, whose backward pass, and that of a bias's gradient, are executed by the interpreter."""

    def __init__(
        self,
        draw: random.Random,
        num_sms: int = 2,
        changed: interpreter.Program | None = None,
        lagging: interpreter.Lagging | None = None,
        *,
        is_alone: bool = False,
        capability: tuple[int, int] = B200,
    ):
        """Its options.

        Args:
            draw: decides whose turn it is.
            num_sms: of a GPU; tiles are split between CTAs where it has more SMs than there are tiles.
            changed: instead of the kernel of the bias's gradient.
            lagging: in that kernel.
            is_alone: only that kernel is executed.
            capability: of the GPU.
        """
        super().__init__(draw, capability=capability)
        self.num_sms_split, self.changed_gradient, self.lagging_gradient = num_sms, changed, lagging
        self.is_alone, self.launches = is_alone, True
        self.plans: list[BiasGradientPlan] = []  # of gradients that have been asked for

    def prepare(self, plan_pass: Any, device: torch.device, spec: AttentionSpec, *given: Any) -> Launch:
        """Prepares either pass as ``_launch_of`` does, without a GPU."""
        if plan_pass == plan_bias_gradient:
            plan = plan_pass(self.architecture, spec, *given, self.num_sms_split)
            self.plans.append(plan)
            launched = Executed(plan, self.draw, self.changed_gradient, self.lagging_gradient)
            return Launch(launched if self.launches else lambda a: None, plan, takes_tiles=False)
        launch = super().prepare(plan_pass, device, spec, *given)
        if not self.is_alone:
            return launch
        return launch._replace(kernel=Executed(launch.plan, self.draw, only="Preprocess"))


def check_dbias(call: Call, backend: WithGradient) -> None:
    """The gradient of a bias against the oracle's, and zeros in its padding."""
    check(call, backend, through_lse=True, only="dbias")
