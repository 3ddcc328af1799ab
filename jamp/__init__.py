"""PyTorch's automatic mixed precision for JAX."""

from jamp._autocast import (
    autocast,
    get_autocast_dtype,
    is_autocast_available,
    is_autocast_enabled,
)
from jamp._custom import custom_bwd, custom_fwd
from jamp._diagnose import Diagnosis, diagnose
from jamp._errors import (
    AutocastError,
    AutocastTypeError,
    BannedOpError,
    JampError,
    JampWarning,
    PolicyError,
    ScalerError,
    ScalerTypeError,
)
from jamp._explain import Report, explain
from jamp._loss_scaling.gradients import value_and_grad
from jamp._loss_scaling.metrics import metrics
from jamp._loss_scaling.scaler import GradScaler
from jamp._loss_scaling.scaler_state import ScalerState
from jamp._loss_scaling.states import (
    DynamicLossScalingState,
    last_step_skipped,
    loss_scale,
    scale_loss,
)
from jamp._loss_scaling.transformation import dynamic_loss_scaling
from jamp._policy.policy import Policy

__version__ = "0.2.0"

__all__ = [
    "AutocastError",
    "AutocastTypeError",
    "BannedOpError",
    "Diagnosis",
    "DynamicLossScalingState",
    "GradScaler",
    "JampError",
    "JampWarning",
    "Policy",
    "PolicyError",
    "Report",
    "ScalerError",
    "ScalerState",
    "ScalerTypeError",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "dynamic_loss_scaling",
    "explain",
    "get_autocast_dtype",
    "is_autocast_available",
    "is_autocast_enabled",
    "last_step_skipped",
    "loss_scale",
    "metrics",
    "scale_loss",
    "value_and_grad",
]
