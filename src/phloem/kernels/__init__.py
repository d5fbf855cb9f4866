"""Linear and attention back ends behind small protocols; each native operation has a plain twin."""
