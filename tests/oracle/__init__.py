"""The test world (gloo ranks), the single-device oracle and the table of cases that both run."""
