"""The canary probe: does every replica answer with the weights that were asked for?"""
