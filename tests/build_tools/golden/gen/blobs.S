/* The cubins of this library, from manifest.json; made by build_tools/embed.py, do not edit. */
    .section .rodata

/* demo.cast-sm_90a-0: sha256 1f4229c3874e5f8fb4a6531b216fb9c277cfdab5ecd39ddaedf7c664c46f21ca */
    .balign 16
    .globl tk_blob_0
    .hidden tk_blob_0
    .type tk_blob_0, @object
tk_blob_0:
    .incbin "units/demo/cast/sm_90a/0/unit.cubin"
    .size tk_blob_0, 293

/* demo.rank-sm_80-0: sha256 9816560c300ab2a30ce243a8b5d6c902f4445d0c170410ab09958ce8173847be */
    .balign 16
    .globl tk_blob_1
    .hidden tk_blob_1
    .type tk_blob_1, @object
tk_blob_1:
    .incbin "units/demo/rank/sm_80/0/unit.cubin"
    .size tk_blob_1, 88

/* demo.rank-sm_90a-0: sha256 bcb7eaabdbc1f209f0b219a55b077e114d295d27302cc1db8cc3679bcab1e26d */
    .balign 16
    .globl tk_blob_2
    .hidden tk_blob_2
    .type tk_blob_2, @object
tk_blob_2:
    .incbin "units/demo/rank/sm_90a/0/unit.cubin"
    .size tk_blob_2, 89

/* demo.transpose-sm_80-0: sha256 80e47f365c9bc098e0ad0ce93af0098690c0a479d669bba0ce6b65821c9c158c */
    .balign 16
    .globl tk_blob_3
    .hidden tk_blob_3
    .type tk_blob_3, @object
tk_blob_3:
    .incbin "units/demo/transpose/sm_80/0/unit.cubin"
    .size tk_blob_3, 153

/* demo.transpose-sm_90a-0: sha256 ece630fc6cbab8ddf53096524ba9837598c336c17ffaf9ac9c03309984c38f1b */
    .balign 16
    .globl tk_blob_4
    .hidden tk_blob_4
    .type tk_blob_4, @object
tk_blob_4:
    .incbin "units/demo/transpose/sm_90a/0/unit.cubin"
    .size tk_blob_4, 154

    .section .note.GNU-stack, "", @progbits
