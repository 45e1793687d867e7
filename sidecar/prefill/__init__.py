"""The prefill endpoints: their addresses, who may be one, their health, and the choice among them."""
