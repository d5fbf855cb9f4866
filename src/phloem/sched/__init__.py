"""What runs in the next step: order, admission, fairness, retraction. Pure policy."""
