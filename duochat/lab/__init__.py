"""The lab measures and makes: benchmark, distillation, cost-faithful targets."""
