"""`jamp.diagnose`: a program in float32 and under autocast, side by side."""

from jamp._diagnosis.diagnosis import Diagnosis as Diagnosis
from jamp._diagnosis.entry import diagnose as diagnose
