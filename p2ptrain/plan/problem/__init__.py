"""What all planners share: the question, the judge, orders, the dynamic programme over cuts."""
