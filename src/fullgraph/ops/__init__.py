"""The ops behind the layers: argument dataclasses, plans, and how a plan is executed. No modules, no state."""
