/* The module of the compiled loops; _loops.pyi says what its functions take. */
#include "loops.h"

static int set_up(PyObject *module) {
    PyMethodDef *const methods[] = {
        barrier_methods, codecs_methods,  copies_methods, filters_methods, rows_methods,
        shared_methods,  squares_methods, sums_methods,   threads_methods, update_methods,
    };
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (PyModule_AddFunctions(module, methods[i]) < 0) return -1;
    return PyModule_AddStringConstant(module, "INSTRUCTIONS", INSTRUCTIONS);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)set_up},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_slots = slots,
};

PyMODINIT_FUNC PyInit__loops(void) { return PyModuleDef_Init(&definition); }
