"""`jamp.diagnose`: a program in float32 and under autocast, side by side."""

from jamp._diagnose.diagnosis import Diagnosis as Diagnosis
from jamp._diagnose.entry import diagnose as diagnose
